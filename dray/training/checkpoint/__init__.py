"""What a checkpoint holds: how it is copied, written, read and rebuilt."""
