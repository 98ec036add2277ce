"""Polls the metadata service (IMDS) for scheduled events, and requests the identity of this VM.

The public modules are `poller` (Poller) and `identity` (IdentityResolver).
"""
