"""Where rows go, and how they get there: sinks, spools that outlive an outage, and the threads that send."""
