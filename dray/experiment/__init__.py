"""Experiments: a search over trials that runs on worker groups and resumes from its journal."""
