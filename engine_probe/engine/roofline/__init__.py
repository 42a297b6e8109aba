"""The executor of virtual time: how long a step takes follows from its FLOPs and bytes, a model's shape and the hardware."""
