"""Polls IMDS for scheduled events, and requests this VM's identity.

The public modules are `poller` (Poller) and `identity` (IdentityResolver).
"""
