-- release: gives a claim back, so that the same request may run again.
--
-- KEYS  1 record   2 in-flight index
-- ARGV  1 digest   2 token   3 'keep': stays bound to its request | 'forget': leaves nothing   4 reason   5 ttl ms
-- Reply one word: released (also when it was before) | finished | lost | gone | unreadable

local digest, token, now = ARGV[1], ARGV[2], clock()
local old = fetch(KEYS[1])

if not old then return 'gone' end
if not readable(old) then return 'unreadable' end
if old.token ~= token then return 'lost' end
if old.state == 'released' then return 'released' end
if FINISHED[old.state] then return 'finished' end
if old.state ~= 'in_progress' then return 'lost' end

redis.call('ZREM', KEYS[2], digest)
if ARGV[3] == 'forget' then
  redis.call('DEL', KEYS[1])
  return 'released'
end
local ttl = tonumber(ARGV[5])
redis.call('HSET', KEYS[1],
  'state', 'released', 'reason', ARGV[4], 'locked_until', '0', 'expires_at', text(now + ttl), 'tombstone_until', '0')
redis.call('PEXPIRE', KEYS[1], text(ttl))
return 'released'
