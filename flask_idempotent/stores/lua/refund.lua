-- refund: takes back the count of a key that turned out not to be new.
--
-- KEYS  1 counter
-- ARGV  none
-- Reply what is left in the window

local count = tonumber(redis.call('GET', KEYS[1]) or '0')
if count <= 0 then return 0 end
return redis.call('DECR', KEYS[1])
