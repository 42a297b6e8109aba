"""The postmortem of a diagnosis: what it meant for people, when what happened, why, and how every number can be checked."""
