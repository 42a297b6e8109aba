"""Triton kernels over paged KV, and the plain torch that says what each of them must give."""
