"""Verdicts on answers beside a teacher's: how often does a reward pay what is wrong, or refuse what is right?

pairs.py      (gold, answer) pairs decided beforehand by a maths teacher's common sense, in pairs.jsonl
judges.py     who is asked: the kit and public rewards, restated as calls of their libraries
count.py      what a judge's verdicts come to: rates with intervals, microseconds
golds.py      reference solutions of GSM8K and MATH-500: each is paid its own gold, and no other
holes.py      a tiny policy trained where a hole pays
"""
