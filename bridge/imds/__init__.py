"""Sends requests to the Instance Metadata Service (IMDS) and parses the responses.

Only this package contains IMDS URLs. `client` sends the requests, and `document` parses the responses.
"""
