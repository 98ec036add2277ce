"""The sink `eventhubs`: CloudEvents into Azure Event Hubs, over AMQP, a websocket or HTTPS.

Public: `sink` (EventHubsSink), `config` (EventHubsConfig). `amqp` and `https` are the two transports; `access`
(address and credential), `message` (partition key and properties) and `errors` serve them.
"""
