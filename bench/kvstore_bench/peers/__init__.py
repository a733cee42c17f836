"""Other stores behind one small protocol, so that `kvstore bench peers` can run the same blocks through each.

blocks.py       the payloads, and where they lie in the pool
store.py        the protocol, and what starting somebody else's server takes
ours.py         kvstore itself: a real service, a real client
others          one file a peer; each lists the paths it has, and how it is installed
"""
