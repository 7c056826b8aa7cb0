-- claim: decides, in one step, who may run.
--
-- KEYS  1 record   2 in-flight index   3 counter of new keys (left out: not limited here)
-- ARGV  1 digest   2 token   3 principal   4 binding   5 lease ms   6 skew ms   7 max_processing ms
--       8 most new keys in a window   9 window ms   10.. recipe, fingerprint (newest first; the first pair is stored)
-- Replies
--   {'claimed', how, fence, attempt, created_at, comparable}   how: new | same (asked before) | reclaimed | again
--   {'replay', comparable, record}          finished; record is the whole hash, flat
--   {'in_progress', ms until it can lapse, comparable, token}   of whoever holds it
--   {'foreign', confirmed, wait, token}    {'mismatch', confirmed, wait, token}    of the record that refuses;
--       confirmed: 1 where it was committed; wait: ms until its lease can lapse, 0 without one
--   {'over'}  this token was given back     {'indeterminate'}     {'expired'}
--   {'limited', ms until the window frees}  {'unreadable', format}

local digest, token, principal, binding = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local lease, skew, max_processing = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local limit, window = tonumber(ARGV[8]), tonumber(ARGV[9])
local PAIRS = 10

local now = clock()
local old = fetch(KEYS[1])
local how, fence, attempt, created, context, comparable = 'new', now, 1, now, '', 1

if old then
  if not readable(old) then return { 'unreadable', old.format or '' } end

  -- Expiry comes first, and only for what is over: an open or unknown outcome never expires into a second run.
  if (FINISHED[old.state] or old.state == 'released') and tonumber(old.expires_at) <= now then
    if tonumber(old.tombstone_until) > now then
      if compare(old, principal, binding, PAIRS) == 'foreign' then return { 'foreign', 1, 0, old.token } end
      return { 'expired' }
    end
    fence = math.max(tonumber(old.fence) + 1, now)
    old = nil
  end
end

if old then
  local likeness = compare(old, principal, binding, PAIRS)
  local open = old.state == 'in_progress'
  local wait = open and math.max(tonumber(old.locked_until) + skew - now, 0) or 0
  if likeness == 'foreign' or likeness == 'mismatch' then
    return { likeness, tonumber(old.confirmed), wait, old.token }
  end
  if likeness == 'unknown' then comparable = 0 end

  if FINISHED[old.state] then return { 'replay', comparable, redis.call('HGETALL', KEYS[1]) } end
  if old.state == 'indeterminate' then return { 'indeterminate' } end

  fence, attempt = math.max(tonumber(old.fence) + 1, now), tonumber(old.attempt) + 1
  created, context = tonumber(old.created_at), old.context
  if old.state == 'released' then
    if old.token == token then return { 'over' } end
    how = 'again'
  elseif old.token == token then
    how, fence, attempt = 'same', tonumber(old.fence), tonumber(old.attempt)
  else
    if wait > 0 then return { 'in_progress', wait, comparable, old.token } end
    how = 'reclaimed'
  end
elseif KEYS[3] and limit > 0 then
  local wait = limited(KEYS[3], limit, window)
  if wait > 0 then return { 'limited', wait } end
end

local rest = redis.call('PTTL', KEYS[1])
local until_ms = now + lease
-- No DEL before: a full server refuses a script at its first write that takes room, and lets through what follows one
-- that takes none.
redis.call('HSET', KEYS[1],
  'format', FORMAT, 'state', 'in_progress', 'token', token, 'fence', text(fence), 'attempt', text(attempt),
  'created_at', text(created), 'locked_until', text(until_ms), 'recipe', ARGV[PAIRS], 'fingerprint', ARGV[PAIRS + 1],
  'principal', principal, 'binding', binding, 'status', '', 'headers', '', 'body', '', 'kind', '', 'cipher', '',
  'context', context, 'reason', '', 'confirmed', '0', 'completed_at', '0', 'expires_at', '0', 'tombstone_until', '0')
redis.call('PEXPIRE', KEYS[1], text(math.max(rest, lease + skew, max_processing)))

redis.call('ZADD', KEYS[2], text(until_ms), digest)
-- What died a day ago and was never asked for again only takes room.
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', text(now - 86400000))
keep(KEYS[2], math.max(lease + skew, max_processing))

return { 'claimed', how, fence, attempt, created, comparable }
