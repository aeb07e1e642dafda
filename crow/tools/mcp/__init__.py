"""MCP servers: the connections to external servers, and the toolbox that offers their tools and the built-in ones."""
