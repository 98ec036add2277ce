"""Approvals: the decisions and rules that tell Azure to start an event early, and the checks before each request.

An approval is consent for every VM that the event names, and a missing one only means that Azure waits until
NotBefore. So what is doubtful is not approved, and every attempt leaves a record. PROTOCOL.md, beside this file, is
what an ops portal implements.

Public: `service.ApprovalService` for the agent; `digest.digest`, `signing.sign_decision`, `signing.generate_key` and
`submit.is_disabled` for commands; `portal_client.PortalClient` and `credentials.SecretCredential` for `check-config`;
`token.verify` for a portal. One decision goes `portal_poller` -> `inbox` -> `token` -> outbox, and then `approver` ->
`evaluate` (with `open_approvals`) and `rules` -> `approval_writer` -> outbox -> `submit` -> Azure -> outbox.
"""
