"""Care for what is stored: sealing, retention, export, backup, verification."""
