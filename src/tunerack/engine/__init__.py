"""The process with the base model: it trains and serves adapters on one copy of the weights."""
