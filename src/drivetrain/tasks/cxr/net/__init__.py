"""The network: encoders, scene graph, fusion and losses."""
