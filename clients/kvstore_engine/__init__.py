"""The included decode engine: a Llama-family model over a paged pool that is the hbm tier.

config      what can be set                     model       weights, tokenizer, keyspace
pool        the bytes of all slots              attention   attention through block tables
executor    one forward over segments           sampling    logits -> token
hbm         which slot holds which block        sequence    one request's state
scheduler   who computes next                   transfers   store work off the scheduler's thread
store       what the scheduler asks of a cache  engine      the thread, and the door to it
chat        templates, tool calls, stop texts   api server  OpenAI-compatible HTTP
"""
