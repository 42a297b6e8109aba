"""One module a family of faults; discovery walks this folder and takes each module's `FAULTS`."""
