"""Adapters: environments of other libraries for conversations of covey, which finds them by entry points.

gymnasium       environments of Gymnasium whose observations and actions can be text
openenv         environments on OpenEnv servers, which `openenv_client.py` contacts
verifiers       environments of the package verifiers, with `verifiers_tasksets.py` from its version 0.4 on

The base of all is `covey.llm.conversation.adapter.Adapter`. Each library is imported by its adapter alone.
"""
