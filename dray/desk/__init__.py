"""The desk: the actor where worker groups get their trials and leave their reports."""
