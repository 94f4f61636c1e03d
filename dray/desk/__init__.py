"""The desk: the actor that lends trials to worker groups, and carries their reports to the driver and back."""
