"""What programs that act for a person use: the MCP server of ``dray mcp``, and the skill file."""
