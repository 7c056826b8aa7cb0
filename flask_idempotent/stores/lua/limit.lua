-- limit: counts a new key where the counter can't share a call with the claim (a cluster).
--
-- KEYS  1 counter
-- ARGV  1 most new keys in a window   2 window ms
-- Reply 0: allowed; else the milliseconds until the window frees

return limited(KEYS[1], tonumber(ARGV[1]), tonumber(ARGV[2]))
