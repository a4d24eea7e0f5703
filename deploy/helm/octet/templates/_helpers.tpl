{{- define "octet.image" -}}
{{ required "image.repository: the image that you have built of deploy/Dockerfile" .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{/* Labels of an object; the argument is a list of the root and the component's name. */}}
{{- define "octet.labels" -}}
{{ include "octet.selector" . }}
app.kubernetes.io/version: {{ (index . 0).Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ (index . 0).Release.Service }}
{{- end }}

{{- define "octet.selector" -}}
app.kubernetes.io/name: octet
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{/* What both pods have: an account of no one, a file system that cannot be written. */}}
{{- define "octet.podSecurity" -}}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile: {type: RuntimeDefault}
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "octet.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{- define "octet.volumes" -}}
- name: tmp
  emptyDir: {}
{{- with .Values.artifacts }}
- name: artifacts
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "octet.mounts" -}}
- {name: tmp, mountPath: /tmp}
{{- if .Values.artifacts }}
- {name: artifacts, mountPath: /artifacts, readOnly: true}
{{- end }}
{{- end }}
