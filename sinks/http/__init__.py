"""What the sinks over HTTP share: the endpoint's keys, its session, its errors, and signatures."""
