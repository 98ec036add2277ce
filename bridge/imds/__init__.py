"""The Instance Metadata Service: its requests, and its Scheduled Events document.

Only this package contains the URLs of the service. `client` sends the requests, and `document` parses the responses.
"""
