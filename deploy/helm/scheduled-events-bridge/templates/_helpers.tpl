{{/* The name of all resources: the name of the release, followed by the name of the chart unless the release contains it. */}}
{{- define "bridge.name" -}}
{{- if .Values.fullnameOverride -}}
{{ .Values.fullnameOverride }}
{{- else if contains .Chart.Name .Release.Name -}}
{{ .Release.Name | trunc 53 | trimSuffix "-" }}
{{- else -}}
{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 53 | trimSuffix "-" }}
{{- end -}}
{{- end }}

{{/* app.kubernetes.io/name is the job that the alert rules and the dashboard require. */}}
{{- define "bridge.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "bridge.labels" -}}
{{ include "bridge.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "bridge.image" -}}
{{- $image := .Values.image -}}
{{- if $image.digest -}}
{{ printf "%s@%s" $image.repository $image.digest }}
{{- else -}}
{{ printf "%s:%s" $image.repository (default .Chart.AppVersion $image.tag) }}
{{- end -}}
{{- end }}

{{- define "bridge.priorityClass" -}}
{{- if .Values.priorityClass.create -}}
{{ default (include "bridge.name" .) .Values.priorityClass.name }}
{{- else -}}
{{ .Values.priorityClass.name }}
{{- end -}}
{{- end }}

{{/* Renders a value as TOML on one line. For strings, numbers, and booleans, the JSON from toJson is also valid TOML. */}}
{{- define "bridge.value" -}}
{{- if kindIs "map" . -}}
{ {{- range $index, $key := keys . | sortAlpha }}{{ if $index }}, {{ end }}{{ include "bridge.key" $key }} = {{ include "bridge.value" (get $ $key) }}{{ end -}} }
{{- else if kindIs "slice" . -}}
[ {{- range $index, $item := . }}{{ if $index }}, {{ end }}{{ include "bridge.value" $item }}{{ end -}} ]
{{- else if kindIs "invalid" . -}}
{{- fail "config contains a key without a value. TOML has no null value. Remove the key" -}}
{{- else -}}
{{ toJson . }}
{{- end -}}
{{- end }}

{{- define "bridge.key" -}}
{{ regexMatch "^[A-Za-z0-9_-]+$" . | ternary . (toJson .) }}
{{- end }}

{{/* Renders each key of a table on a separate line. */}}
{{- define "bridge.table" -}}
{{- range $key := keys . | sortAlpha }}
{{ include "bridge.key" $key }} = {{ include "bridge.value" (get $ $key) }}
{{- end }}
{{- end }}

{{- define "bridge.config" -}}
{{- if .Values.configToml -}}
{{ .Values.configToml | trimSuffix "\n" }}
{{- else -}}
{{- $config := .Values.config -}}
{{- range $key := keys $config | sortAlpha }}
{{- if not (or (kindIs "map" (get $config $key)) (eq $key "sinks")) }}
{{ $key }} = {{ include "bridge.value" (get $config $key) }}
{{- end }}
{{- end }}
{{- range $key := keys $config | sortAlpha }}
{{- if kindIs "map" (get $config $key) }}

[{{ $key }}]
{{- include "bridge.table" (get $config $key) }}
{{- end }}
{{- end }}
{{- range $config.sinks }}

[[sinks]]
{{- include "bridge.table" . }}
{{- end }}
{{- end }}
{{- if .Values.drain.enabled }}
{{- $arguments := "" }}
{{- range .Values.drain.arguments }}{{ $arguments = printf "%s, %s" $arguments (toJson .) }}{{ end }}

# Do not set event_types: the program must run at the end of each event, or a node stays cordoned. It ignores Freeze.
[[sinks]]
type = "command"
name = "drain"
command = ["python3", "-I", "/opt/scheduled-events-bridge/drain.py"{{ $arguments }}]
transitions = ["scheduled", "started", "completed", "canceled", "ended"]
max_age_seconds = 3600

# An eviction leaves only 30 seconds, so it has a separate table and does not wait for a drain.
[[sinks]]
type = "command"
name = "leave"
command = ["python3", "-I", "/opt/scheduled-events-bridge/drain.py", "--now"{{ $arguments }}]
transitions = ["scheduled"]
event_types = ["Preempt", "Terminate"]
timeout_seconds = 25
{{- end }}
{{- end }}

{{/* Finds stop_grace_seconds in the rendered configuration, which can come from config or configToml. */}}
{{- define "bridge.stopGrace" -}}
{{- $line := include "bridge.config" . | regexFind "(?m)^[ \\t]*stop_grace_seconds[ \\t]*=[ \\t]*[0-9_.]+" -}}
{{- $line | regexFind "[0-9_.]+$" | replace "_" "" | default "10" -}}
{{- end }}

{{/* Renders the request of a probe. The argument is a list of the root context and the path. */}}
{{- define "bridge.probe" -}}
{{- $root := index . 0 -}}
httpGet:
  {{- if $root.Values.hostNetwork }}
  host: 127.0.0.1
  {{- end }}
  path: {{ index . 1 }}
  port: {{ $root.Values.port }}
{{- end }}
