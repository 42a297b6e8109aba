"""SQL for people: a child process in a jail, and both sides of the talk with it."""
