"""Which method for which data and reward?"""
