"""The routes of other engines, so that trainers written for them work unmodified.

Each file translates one engine's bodies to the calls that the native routes make; nothing stands behind it but those.
"""
