"""What several causes share: one reading of a window, and the claim that follows from it."""
