"""The engine that asks IMDS: one poll a second, each answer compared and stored; and who this VM is.

Public: `poller` (Poller), `identity` (IdentityResolver).
"""
