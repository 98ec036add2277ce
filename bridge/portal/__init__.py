"""The reference ops portal. It receives records from agents, and sends the decisions of people to the agents.

The portal is a separate server and needs the extra `portal`. The agent never imports this package. Public modules:
`command` (the functions behind the commands), `settings` (PortalSettings), `serve` (Portal), `users` (Role, hashed),
and `store` (the only code with SQL).
"""
