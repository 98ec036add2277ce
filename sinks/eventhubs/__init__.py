"""The sink `eventhubs`: CloudEvents into Azure Event Hubs, over AMQP, a websocket or HTTPS."""
