"""Links move messages between stages. Which one serves two stages follows from where they live.

`channel` what a stream of messages is, `wire` how one lies in memory; `local`, `shared`, `group` the ways; `choose`.
"""
