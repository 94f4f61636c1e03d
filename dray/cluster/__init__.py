"""The Ray cluster: connecting to it, its nodes, its autoscaler, and checks of what trials need."""
