"""Leases of worker groups to trials: which trial gets which group, and how that ends."""
