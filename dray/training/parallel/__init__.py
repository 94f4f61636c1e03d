"""The processes of one trial: their devices, their process group, and how they agree."""
