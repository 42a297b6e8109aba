"""The fault lab: one injected cause at a time on the virtual fleet, the truth from a paired run, the verdict held against it."""
