"""The project's own sinks, one file each, reached by entry point like anybody's."""
