"""The OpenAI-compatible HTTP interface of the control process."""
