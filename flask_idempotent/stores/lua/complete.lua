-- complete: keeps the answer, if the claim is still ours. A finished record is never overwritten.
--
-- KEYS  1 record   2 in-flight index
-- ARGV  1 digest   2 token   3 principal   4 binding   5 state (succeeded | failed)   6 status   7 headers   8 body
--       9 kind   10 cipher   11 reason   12 confirmed (0 | 1)   13 ttl ms   14 tombstone ms
--       15 expires_at of the row that this is a copy of, 0 where the life begins now   16.. recipe, fingerprint
-- Replies
--   {'stored', expires_at}           kept by this call
--   {'stored', expires_at, record}   kept before, by this claim: record is what is stored, and what is answered
--   {'lost', ms left of the other's lease, record | false}   record: a finished winner's, where the request is the same
--   {'gone'}                         nothing is there: the server lost it, or the row's life is over
--   {'unreadable', format}

local digest, token, now = ARGV[1], ARGV[2], clock()
local ttl, tombstone = tonumber(ARGV[13]), tonumber(ARGV[14])
local old = fetch(KEYS[1])

if not old then return { 'gone' } end
if not readable(old) then return { 'unreadable', old.format or '' } end

if old.token == token and FINISHED[old.state] then
  return { 'stored', tonumber(old.expires_at), redis.call('HGETALL', KEYS[1]) }
end
if old.token ~= token or old.state ~= 'in_progress' then
  local likeness = compare(old, ARGV[3], ARGV[4], 16)
  local winner = FINISHED[old.state] and tonumber(old.expires_at) > now and likeness ~= 'foreign' and likeness ~= 'mismatch'
  return { 'lost', math.max(tonumber(old.locked_until) - now, 0), winner and redis.call('HGETALL', KEYS[1]) }
end

local expires = tonumber(ARGV[15])
if expires == 0 then expires = now + ttl end
redis.call('ZREM', KEYS[2], digest)
if expires <= now then
  redis.call('DEL', KEYS[1])
  return { 'gone' }
end
redis.call('HSET', KEYS[1],
  'state', ARGV[5], 'status', ARGV[6], 'headers', ARGV[7], 'body', ARGV[8], 'kind', ARGV[9], 'cipher', ARGV[10],
  'reason', ARGV[11], 'confirmed', ARGV[12], 'locked_until', '0', 'completed_at', text(now),
  'expires_at', text(expires), 'tombstone_until', text(tombstone > 0 and expires + tombstone or 0))
redis.call('PEXPIREAT', KEYS[1], text(expires + tombstone))
return { 'stored', expires }
