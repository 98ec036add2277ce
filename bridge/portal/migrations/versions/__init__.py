"""The steps from an empty database to the tables of `bridge.portal.schema`. A step that was released never changes."""
