"""The poll of the metadata service (IMDS), and the request for the identity of this VM.

The public modules are `poller` (Poller) and `identity` (IdentityResolver).
"""
