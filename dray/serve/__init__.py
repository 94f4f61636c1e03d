"""A server that lends worker groups to experiments, as experiments lend them to trials."""
