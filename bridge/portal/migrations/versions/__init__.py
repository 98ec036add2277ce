"""The steps from an empty database to the tables of `bridge.portal.schema`. Released steps never change."""
