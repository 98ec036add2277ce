"""The reference ops portal: receives records from agents, and sends them the decisions of people.

The portal is a server of its own, with the extra `portal`. No module of the agent imports it. Public: `command` (the
functions behind the commands), `settings` (PortalSettings), `serve` (Portal), `users` (Role, hashed), and `store`
(the only code with SQL).
"""
