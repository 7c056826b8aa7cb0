-- renew: prolongs leases, many in one call.
--
-- KEYS  record, in-flight index: a pair for each claim
-- ARGV  digest, token, lease ms, least life ms: four for each
-- Reply a number for each claim: 1 prolonged; 0 it is not ours any more

local now = clock()
local renewed = {}
for n = 1, #KEYS / 2 do
  local record, index, at = KEYS[2 * n - 1], KEYS[2 * n], 4 * (n - 1)
  local digest, token, lease, life = ARGV[at + 1], ARGV[at + 2], tonumber(ARGV[at + 3]), tonumber(ARGV[at + 4])
  local held = peek(record, { 'format', 'state', 'token', 'locked_until' })
  renewed[n] = 0
  if held and held[1] == FORMAT and held[2] == 'in_progress' and held[3] == token then
    local until_ms = math.max(now + lease, tonumber(held[4]))
    redis.call('HSET', record, 'locked_until', text(until_ms))
    keep(record, life)
    redis.call('ZADD', index, text(until_ms), digest)
    keep(index, life)
    renewed[n] = 1
  end
end
return renewed
