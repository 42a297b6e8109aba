"""A load generator: calls as prompts to any OpenAI endpoint, answers as rows at the client's vantage."""
