"""Accuracy of a model behind any server with OpenAI's API: a few classic tasks, from files of their usual form.

For the long list of tasks there is EleutherAI's lm-eval, which speaks to the server as well (docs/commands.md). These
here need nothing installed, and answer one question: did a change of the engine change what the model can do?
"""
