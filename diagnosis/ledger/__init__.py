"""Each request's time split into cause-seconds that sum to it, and what that rests on."""
