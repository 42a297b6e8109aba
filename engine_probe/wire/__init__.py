"""What goes over the wire: bodies encoded, decoded and judged against the contract."""
