-- common: what all scripts share; the loader puts it in front of each.
--
-- A record is one hash. Fields (all are written from the start, so that a reader never guesses):
--   format        version of this layout; another one is refused
--   state         in_progress | succeeded | failed | released | indeterminate
--   token         random, one per claim; every write compares it
--   fence         rises with every claim: max(old + 1, server milliseconds)
--   attempt       1 for the first run
--   created_at    ms, start of attempt 1; outlives re-claims
--   locked_until  ms, end of the lease (without skew); 0 when nobody runs
--   recipe, fingerprint, principal, binding   digests that a repeat must match
--   status, headers, body, kind, cipher       the answer that is kept, perhaps encrypted
--   context, reason, confirmed                what the work noted; why it stands so; '1' when the authority agrees
--   completed_at, expires_at, tombstone_until ms; 0 for none
--
-- Digests are compared with ==. Lua interns every string, so that compares two pointers: its time does not depend on
-- where two digests differ.

local FORMAT = '1'
local FINISHED = { succeeded = true, failed = true }
local STATES = { in_progress = true, succeeded = true, failed = true, released = true, indeterminate = true }
local DECIDING = {
  'format', 'state', 'token', 'fence', 'attempt', 'created_at', 'locked_until', 'recipe', 'fingerprint', 'principal',
  'binding', 'context', 'confirmed', 'expires_at', 'tombstone_until',
}
local NUMBERS = { 'fence', 'attempt', 'created_at', 'locked_until', 'confirmed', 'expires_at', 'tombstone_until' }

-- Milliseconds since the epoch by the server's clock, the only one that counts.
local function clock()
  local t = redis.call('TIME')
  return tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000)
end

-- A whole number as text; the default conversion loses digits.
local function text(number)
  return string.format('%.0f', number)
end

-- Fields of a hash; nil where the key holds something else.
local function peek(key, names)
  local values = redis.pcall('HMGET', key, unpack(names))
  if not values.err then return values end
  local why = tostring(values.err)
  if string.find(why, 'WRONGTYPE', 1, true) then return nil end
  error(why)
end

-- The fields that decide, without headers and body: how long this takes tells nothing of what is kept.
-- nil where there is no record; an empty one, which is not readable, where the key holds something else.
local function fetch(key)
  local values = peek(key, DECIDING)
  if not values then return {} end
  local record, found = {}, false
  for i, name in ipairs(DECIDING) do
    if values[i] then
      record[name] = values[i]
      found = true
    end
  end
  if not found then
    if redis.call('EXISTS', key) == 1 then return {} end
    return nil
  end
  return record
end

-- Whether this layout is ours to read, and whole.
local function readable(record)
  if record.format ~= FORMAT or not STATES[record.state] then return false end
  for _, name in ipairs(DECIDING) do
    if not record[name] then return false end
  end
  for _, name in ipairs(NUMBERS) do
    if not tonumber(record[name]) then return false end
  end
  return true
end

-- Gives a key at least `ms` to live: never shortens, never leaves it without an end.
local function keep(key, ms)
  if redis.call('PTTL', key) < ms then redis.call('PEXPIRE', key, text(ms)) end
end

-- How a request compares with a record: 'foreign', 'mismatch', 'same', or 'unknown' where no recipe is shared.
-- `first` is the index in ARGV of the first of its (recipe, fingerprint) pairs.
local function compare(record, principal, binding, first)
  if record.principal ~= principal or record.binding ~= binding then return 'foreign' end
  for i = first, #ARGV, 2 do
    if ARGV[i] == record.recipe then
      if ARGV[i + 1] == record.fingerprint then return 'same' end
      return 'mismatch'
    end
  end
  return 'unknown'
end

-- Counts a new key. 0: allowed; else the milliseconds until the window frees.
local function limited(key, limit, window_ms)
  local count = tonumber(redis.call('GET', key) or '0')
  if count >= limit then
    local rest = redis.call('PTTL', key)
    if rest > 0 then return rest end
    redis.call('SET', key, '1', 'PX', text(window_ms))
    return 0
  end
  redis.call('INCR', key)
  if redis.call('PTTL', key) < 0 then redis.call('PEXPIRE', key, text(window_ms)) end
  return 0
end
